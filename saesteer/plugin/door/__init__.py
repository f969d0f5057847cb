"""The front end: a request is checked, refused with 400, or sent on with what it edits. Knows no tensor."""
