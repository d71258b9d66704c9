"""What several tests share: small models, drafts of known quality, oracles and comparisons."""
