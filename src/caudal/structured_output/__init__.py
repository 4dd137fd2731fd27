"""Output of a given form: schemas and grammars checked, compiled and followed token by token."""
