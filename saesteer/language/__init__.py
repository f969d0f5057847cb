"""What a request may say, checked value by value. Knows no server, and needs only the standard library."""
