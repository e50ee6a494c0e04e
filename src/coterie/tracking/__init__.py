"""Finished runs as MLflow or TensorBoard show them; `coterie.tracking.track` writes them."""
