"""Names what saturates a server, what would cure it, and what each cure would bring."""
