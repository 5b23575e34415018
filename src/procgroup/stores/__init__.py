"""Key-value stores, through which processes find each other."""
