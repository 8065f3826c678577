"""What happens when a compiled model is called: capture, rewrite and run its graphs, and what is outside of them."""
