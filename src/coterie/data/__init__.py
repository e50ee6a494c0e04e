"""Client-partitioned data: the container, loaders, embedded examples and generators."""
