"""Names while serving: vectors and modules come and go, and all processes agree what a name means."""
