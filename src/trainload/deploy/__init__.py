"""Files for other systems: Kubernetes, schedulers and Grafana."""
