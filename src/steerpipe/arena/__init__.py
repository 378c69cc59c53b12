"""Every predictor on the same held-out prompts: what it knows, what it costs, and what it is worth."""
