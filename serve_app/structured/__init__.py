"""What a reply must look like: from the fields that ask for it to a compiled grammar."""
