"""``procgroup metrics``: what the jobs of this host do, for Prometheus."""
