"""Commands that write manifests for other operators than KubeRay."""
