"""Real federations: a plan on Flower, over a network."""
