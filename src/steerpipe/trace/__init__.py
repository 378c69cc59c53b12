"""What a model routed, token by token: hooks, files, and what reads them."""
