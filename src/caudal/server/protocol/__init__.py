"""Request bodies of the HTTP API; field constraints are both the validation and the schema."""
