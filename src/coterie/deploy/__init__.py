"""Deployment on Flower: a coordinator, sites that keep their rows, signed messages between them."""
