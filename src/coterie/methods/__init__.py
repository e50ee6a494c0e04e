"""Methods, one file each; `coterie.methods.base.registered()` finds them."""
