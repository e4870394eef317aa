"""One per node: admission, the warm pool of sandboxes, the relay of their messages."""
