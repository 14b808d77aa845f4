"""Publishing of packages: stores, registries and signatures."""
