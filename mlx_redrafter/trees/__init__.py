"""Token trees and batches of trees."""
