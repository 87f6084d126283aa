version = "neo"
release = "2.30"
