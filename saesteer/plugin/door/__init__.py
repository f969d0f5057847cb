"""The front end: checks a request, and refuses it with 400 or sends it on with what it edits. Knows no tensor."""
