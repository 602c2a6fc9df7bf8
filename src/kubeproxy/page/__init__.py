"""The page of the metrics server, /ui/: what it shows, who may see it, what it is told while it is open."""
