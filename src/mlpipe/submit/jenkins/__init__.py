"""The backend `jenkins`: a build of a job there makes the run, and follows it."""
