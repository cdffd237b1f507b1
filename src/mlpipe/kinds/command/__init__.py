"""A program of the user's, with a folder for what it makes."""
