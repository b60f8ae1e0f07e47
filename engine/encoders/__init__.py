"""Vision and audio towers, one file per family: features of one media item in, embedding rows out."""
