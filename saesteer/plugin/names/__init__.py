"""Names while serving: vectors and modules come and go, and all processes agree on what a name means."""
