"""Knowledge graphs: entities with names, relations between them, their mentions in texts, and
embeddings.
"""
