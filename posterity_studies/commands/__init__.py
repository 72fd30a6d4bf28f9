"""The commands of the studies, one file each; none imports torch before it runs."""
