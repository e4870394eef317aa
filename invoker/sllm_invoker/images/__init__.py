"""Images that functions' containers run from: a base made of what this node itself runs, and layers over it."""
