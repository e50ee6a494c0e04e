"""Plans: what a run is, what it guarantees, what rules fill in, and whether joining pays."""
