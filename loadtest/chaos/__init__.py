"""A campaign of hostile requests, kills and long load against a server that it starts itself."""
