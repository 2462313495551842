"""seed"""
