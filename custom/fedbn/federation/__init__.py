"""Sites and a server without transport: what each does in a round."""
