"""What a machine and its nodes can do: checks (`doctor`), tests (`test-dist`) and measurements (`bench`)."""
