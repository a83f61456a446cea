"""CSV-Decode as published: clusters of output rows, opened until a certificate holds."""
