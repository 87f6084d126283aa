version = "1.0.0v2-v1.10.1RC"
