version = "classic"
