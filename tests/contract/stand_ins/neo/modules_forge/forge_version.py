version = "neo"
release = "2.26"
