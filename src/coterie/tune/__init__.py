"""Choose settings by cross-validation or by charged private runs, and compare methods."""
