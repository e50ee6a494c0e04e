"""Parts of the example: characters drawn from fonts, and a network trained on them."""
