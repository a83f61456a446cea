"""What a server costs while nobody asks it anything."""
