"""A small transformer that is added to OneDiff as a family, in the steps of "Add a transformer" in
.readme/developing.md."""
