# What a node may do: read the artifact's bucket and its own three secrets.

resource "google_service_account" "node" {
  project      = var.project
  account_id   = "${var.name}-node"
  display_name = "Nodes of the sllm pool ${var.name}"
}

resource "google_storage_bucket_iam_member" "node" {
  bucket = var.bucket
  role   = "roles/storage.objectViewer"
  member = google_service_account.node.member
}

resource "google_secret_manager_secret_iam_member" "node" {
  for_each = toset(["nats-ca", "node-key", "node-peer-token"])

  project   = var.project
  secret_id = "${var.secret_prefix}-${each.key}"
  role      = "roles/secretmanager.secretAccessor"
  member    = google_service_account.node.member
}
