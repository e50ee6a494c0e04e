"""Use the models of a finished run: export, predict, and onboard new clients."""
