"""Local files: direct reads where the file system has them, buffered ones where it has not."""
