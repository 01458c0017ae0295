"""The built wheel, in a fresh environment outside the repository."""
