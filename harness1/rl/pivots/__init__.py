"""Single turns of a teacher's episodes from which a policy has something to learn."""
