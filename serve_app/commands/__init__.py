"""The subcommands of `lexshard`, one file each."""
