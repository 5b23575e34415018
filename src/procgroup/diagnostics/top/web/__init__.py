"""``procgroup top --web``: the live view as a page in a browser, served on loopback."""
