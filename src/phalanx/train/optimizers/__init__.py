"""The update rules: a file per optimizer, each a torch optimizer over parameter shards."""
