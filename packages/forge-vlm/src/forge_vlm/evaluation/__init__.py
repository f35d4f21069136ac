"""Questions with images in local files, and the metrics of answers."""
