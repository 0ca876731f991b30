"""Parts of every command: options, TOML files, one-line messages, and late imports."""
