"""What a request may say, checked value by value. This room knows no server and needs only the standard library."""
